import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.launch import LaunchConfig
from lockstep.config.recording import FORMATS, NumericsRecord, parse_recording, read_recording
from lockstep.errors import ConfigError

NAMES = st.text(st.characters(blacklist_characters="\0/", blacklist_categories=("Cs",)), min_size=1, max_size=12)
ENDINGS = st.sampled_from(["", "@1,2", "@every=3", "@parquet", "@jsonl", "@"])


@given(
    name=NAMES.filter(lambda name: name not in (".", "..")),
    ending=ENDINGS,
    choice=st.one_of(
        st.integers(1, 1000), st.lists(st.integers(0, 10**9), min_size=1, max_size=5, unique=True).map(sorted)
    ),
    form=st.sampled_from(FORMATS),
)
def test_what_is_written_as_text_is_read_again(name, ending, choice, form):
    chosen = {"every": choice} if isinstance(choice, int) else {"batches": tuple(choice)}
    asked = NumericsRecord(path=f"/traces/{name}{ending}", format=form, **chosen)
    assert parse_recording(asked.text()) == asked


def test_the_forms_that_people_type():
    here = os.getcwd()
    assert parse_recording("trace") == NumericsRecord(path=f"{here}/trace")
    assert parse_recording("trace@every=10") == NumericsRecord(path=f"{here}/trace", every=10)
    assert parse_recording("trace@150,149,parquet") == NumericsRecord(
        path=f"{here}/trace", batches=(149, 150), format="parquet"
    )
    assert parse_recording("user@host") == NumericsRecord(path=f"{here}/user@host")
    assert read_recording({}) is None
    assert read_recording({"LOCKSTEP_NUMERICS_RECORD": ""}) is None
    assert read_recording({"LOCKSTEP_NUMERICS_RECORD": "/t@3"}) == NumericsRecord(path="/t", batches=(3,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@every=2", "names no folder"),
        ("t@every=0", "must be 1 or more"),
        ("t@every=x", "not a whole number"),
        ("t@every=2,5", "two answers"),
        ("t@-1", "must be 0 or more"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_variable_and_the_flag(text, said):
    with pytest.raises(ConfigError, match=said):
        read_recording({"LOCKSTEP_NUMERICS_RECORD": text})
    with pytest.raises(ConfigError, match=said):
        LaunchConfig(numerics_record=text)
