"""Secrets: known by name, by shape, and by value wherever a known one turns up again. Ordinary logs stay readable."""

from __future__ import annotations

import json
import shlex
import string
import time
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.doctor.redact import HIDDEN, SHORTEST, Redactor, names_a_secret
from tests.unit.doctor.secret_samples import HARMLESS, SECRETS

SECRET_NAMES = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "GITHUB_TOKEN_2",
    "MY_SECRET",
    "PGPASSWORD",
    "MYSQL_PWD",
    "SENTRY_DSN",
    "hf_token",
    "apiKey",
    "clientSecret",
    "accessToken",
    "db.password",
    "--api-key",
    "--auth_token",
    "Authorization",
    "OPENAI_API_KEY",
    "passwd",
    "SSH_PASSPHRASE",
    "cookie",
]
OTHER_NAMES = [
    "TOKENIZERS_PARALLELISM",
    "max_tokens",
    "num_tokens",
    "tokens",
    "tokens_per_second",
    "PWD",
    "OLDPWD",
    "eos_token_id",
    "pad_token",
    "key",
    "keys",
    "monkey",
    "SSH_AUTH_SOCK",
    "tokenizer",
    "keyboard",
    "author",
    "authority",
    "epoch",
    "loss",
    "lr",
    "DATABASE_URL",
    "key_padding_mask",
    "LOCKSTEP_DEBUG_MODE",
    "public_key",
]

SECRETS_HEX = "3f" + "9a0c" * 7 + "1e"

SHAPED = [
    "hf_" + "aB3" * 11,
    "ghp_" + "x1" * 18,
    "github_pat_" + "A1b2_" * 6,
    "glpat-" + "ab12-_" * 4,
    "sk-proj-" + "aB1" * 10,
    "AKIAIOSFODNN7EXAMPLE",
    "AIza" + "Sy0" * 12,
    "xoxb-1234567890-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_123",
    "npm_" + "a" * 36,
]

VALUES = st.text(
    alphabet=string.ascii_letters + string.digits + "éß漢!#$%^*+/=?_.-\"'\\ ", min_size=10, max_size=40
).filter(
    # One that is made of a word of the report, or of nothing but signs, cannot be told from the report.
    lambda text: sum(char.isalnum() for char in text) >= 8 and text.strip() == text and not text.isdigit()
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_things(name: str) -> None:
    assert not names_a_secret(name)


@pytest.mark.parametrize("secret", SHAPED)
def test_shapes(secret: str) -> None:
    for text in (
        secret,
        f"login with {secret} failed",
        f'{{"x": "{secret}"}}',
        f"https://host/?a={secret}&b=1",
        f"x={secret}",
    ):
        assert secret not in Redactor().text(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://bob:hunter2@host/x", f"https://{HIDDEN}@host/x"),
        ("git clone https://oauth2@host/x.git", f"git clone https://{HIDDEN}@host/x.git"),
        ("postgresql://u:p@ss:w@db:5432/x", f"postgresql://{HIDDEN}@db:5432/x"),
        ("https://host/a?b=1", "https://host/a?b=1"),
        ("export HF_TOKEN=abc", f"export HF_TOKEN={HIDDEN}"),
        ('{"password": "two words", "n": 3}', f'{{"password": "{HIDDEN}", "n": 3}}'),
        ("train.py --api-key abc --lr 1", f"train.py --api-key {HIDDEN} --lr 1"),
        ("train.py --api-key=abc --lr 1", f"train.py --api-key={HIDDEN} --lr 1"),
        ("Authorization: Bearer abc.def", f"Authorization: {HIDDEN}"),
        ("X-Api-Key: abcdef", f"X-Api-Key: {HIDDEN}"),
        ("got Bearer abcdefgh12 back", f"got Bearer {HIDDEN} back"),
        ("https://x.blob/a?sv=1&sig=abc%2Fdef&se=2", f"https://x.blob/a?sv=1&{HIDDEN}&se=2"),
    ],
)
def test_places_of_secrets(text: str, shown: str) -> None:
    assert Redactor().text(text) == shown


@pytest.mark.parametrize(
    "line",
    [
        "step 12 | loss 0.31 | tokens/s 12345 | num_tokens=4096 | max_tokens: 2048",
        "node1:100:100 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        'File "/home/bob/train.py", line 12, in main',
        "KeyError: 'hidden_states'",
        "commit 3e6a0ee5b1f2c3d4e5f60718293a4b5c6d7e8f90",
        "token = None, password: null, secret=false, key=3",
        "the token was refused; see https://host/docs#keys",
        "tokenizer: <class 'Tokenizer'> eos_token='</s>'",
    ],
)
def test_ordinary_lines_stay(line: str) -> None:
    assert Redactor().text(line) == line


@pytest.mark.parametrize("ending", ["-----END RSA PRIVATE KEY-----", ""])
def test_private_keys_whole_and_cut(ending: str) -> None:
    body = "\n".join(("MIIEpAIBAAKCAQEA" + letter * 40) for letter in "abc")
    whole = f"before\n-----BEGIN RSA PRIVATE KEY-----\n{body}\n{ending}"
    assert "MIIE" not in Redactor().text(whole)
    if ending:
        # The beginning was above the lines that were kept.
        assert "MIIE" not in Redactor().text(f"{body}\n{ending}\nafter")
        assert "after" in Redactor().text(f"{body}\n{ending}\nafter")


@settings(max_examples=150, deadline=None)
@given(VALUES, st.sampled_from(SECRET_NAMES), st.data())
def test_a_secret_that_is_named_once_is_hidden_everywhere(secret: str, name: str, data: st.DataObject) -> None:
    how = data.draw(st.sampled_from(["environ", "option", "option=", "key", "url"]))
    redactor = Redactor()
    if how == "environ":
        redactor.learn({name: secret, "HOME": "/root"})
    elif how == "option":
        redactor.learn(argv=["train.py", "--token", secret])
    elif how == "option=":
        redactor.learn(argv=["train.py", f"--token={secret}"])
    elif how == "key":
        redactor.learn_from({"a": [{name: secret}]})
    else:
        redactor.learn({"DATABASE_URL": f"https://bob:{quote(secret, safe='')}@host/x"})
    for text in (
        secret,
        f"the server said no to {secret}!",
        json.dumps({"note": secret}),
        json.dumps(["a", f"x {secret} y"], indent=1),
        repr([secret]),
        f"https://host/?q={quote(secret, safe='')}",
        f"run {shlex.quote(secret)}",
    ):
        assert secret not in redactor.text(text), (how, text)
        assert json.dumps(secret)[1:-1] not in redactor.text(text)
        assert quote(secret, safe="") not in redactor.text(text)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.sampled_from(SECRET_NAMES))
def test_data_and_command_lines(secret: str, name: str) -> None:
    redactor = Redactor()
    data = {
        "env": {name: secret, "LR": "0.1"},
        "argv": ["python", "train.py", "--token", secret, f"--password={secret}", "--lr", "0.1"],
        "nested": [{"inner": {name: [secret, {"more": secret}]}}],
    }
    shown = redactor.data(data)
    assert secret not in json.dumps(shown, ensure_ascii=False)
    assert json.dumps(secret)[1:-1] not in json.dumps(shown)
    assert shown["env"]["LR"] == "0.1"
    assert shown["argv"][-2:] == ["--lr", "0.1"]
    assert shown["argv"][2] == "--token"
    assert redactor.environ({name: secret, "LR": "0.1"}) == {name: HIDDEN, "LR": "0.1"}


def test_short_and_plain_values_do_not_spoil_the_rest() -> None:
    redactor = Redactor().learn({"MY_TOKEN": "1", "MY_KEY": "abc", "MY_SECRET": "false", "OTHER_TOKEN": "123456"})
    line = "1 of 3: abc false 123456"
    assert len("abc") < SHORTEST
    assert redactor.text(line) == line


def test_numbers_under_a_telling_key_stay() -> None:
    shown = Redactor().data({"token": 3, "secret": None, "password": True, "key_size": 4, "api_key": "x"})
    assert shown == {"token": 3, "secret": None, "password": True, "key_size": 4, "api_key": HIDDEN}


@pytest.mark.parametrize("piece", ["y", "a=", "://", " ", "sk-a-", "-", "\n", "a:b@"])
def test_no_text_takes_for_ever(piece: str) -> None:
    """A pattern that tries every beginning against every end would need hours here."""
    Redactor().learn({"MY_TOKEN": "abcdefgh"}).text(piece * (300_000 // len(piece)))


@pytest.mark.parametrize("secret", ["-000000000", "-a=bcdefgh", "--lr=abcdef"])
def test_a_secret_may_look_like_an_option(secret: str) -> None:
    words = ["train.py", "--api-key", secret, "--lr", "1"]
    redactor = Redactor().learn(argv=words)
    assert redactor.argv(words) == ["train.py", "--api-key", HIDDEN, "--lr", "1"]
    assert secret not in redactor.text(f"refused {secret}")


# ---------------------------------------------------------------- the set


def test_the_set_is_as_large_as_the_docs_say() -> None:
    assert len(SECRETS) >= 150
    assert len(HARMLESS) >= 100


@pytest.mark.parametrize(("text", "secrets"), SECRETS, ids=[f"{n}" for n in range(len(SECRETS))])
def test_no_secret_of_the_set_comes_through(text: str, secrets: tuple[str, ...]) -> None:
    shown = Redactor().text(text)
    assert not [secret for secret in secrets if secret in shown], shown
    # Nor in the middle of a log, nor with what one rank's lines begin with.
    shown = Redactor().text(f"step 1\n{text}\nstep 2\n")
    assert not [secret for secret in secrets if secret in shown], shown
    assert "step 1" in shown


def test_harmless_lines_stay_as_they_are() -> None:
    altered = [line for line in HARMLESS if Redactor().text(line) != line]
    assert len(altered) <= 2, altered
    whole = "\n".join(HARMLESS)
    assert sum(old != new for old, new in zip(HARMLESS, Redactor().text(whole).split("\n"), strict=True)) <= 2


def test_what_a_secret_stands_between_stays() -> None:
    yaml = "a: 1\nservice:\n  token: >-\n    " + "x1" * 20 + "\n  port: 5432\nname: train\n"
    shown = Redactor().text(yaml)
    assert shown == f"a: 1\nservice:\n  token: >-\n    {HIDDEN}\n  port: 5432\nname: train\n"
    shown = Redactor().text("run(lr=0.1, api_key='abc', steps=3)\nDB_PASS=a b!c\nLR=1")
    assert shown == f"run(lr=0.1, api_key='{HIDDEN}', steps=3)\nDB_PASS={HIDDEN}\nLR=1"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("auth=('bob', 'hunter2')", f"auth=('bob', '{HIDDEN}')"),
        (f"tokens = {{'a': '{SECRETS_HEX}', 'b': 3}}", f"tokens = {{'a': '{HIDDEN}', 'b': 3}}"),
        ("auth={'user': 'bob', 'password': 'hunter'}", f"auth={{'user': 'bob', 'password': '{HIDDEN}'}}"),
        ("credentials={'user': 'bob', 'x': 'hunter'}", f"credentials={{{HIDDEN}}}"),
    ],
)
def test_tuples_and_mappings(text: str, shown: str) -> None:
    assert Redactor().text(text) == shown


def test_the_secret_of_a_job_is_one_by_its_name() -> None:
    assert names_a_secret("LOCKSTEP_JOB_SECRET")
    assert Redactor().environ({"LOCKSTEP_JOB_SECRET": "ab"}) == {"LOCKSTEP_JOB_SECRET": HIDDEN}
    learned = Redactor().learn({"LOCKSTEP_JOB_SECRET": "0123456789abcdef"})
    assert "0123456789abcdef" not in learned.text("joined with 0123456789abcdef")


def test_data_knows_a_key_by_its_value() -> None:
    key = SECRETS_HEX
    assert Redactor().data({"username": "bob", "key": key}) == {"username": "bob", "key": HIDDEN}
    assert Redactor().data({"key": "model.layers.0.weight"}) == {"key": "model.layers.0.weight"}
    assert Redactor().data({"tokens": [key, "the", "cat"]}) == {"tokens": [HIDDEN, "the", "cat"]}
    assert key not in Redactor().learn_from({"username": "bob", "key": key}).text(f"kaggle refused {key}")


@pytest.mark.soak
@pytest.mark.parametrize(
    "piece",
    [
        *(
            "a=",
            "tokens: ['a', ",
            "password='",
            'password="""',
            "keys:\n  a\n",
            "mysql ",
            "curl -u ",
            "secret: {",
            "eyJ",
        ),
        *(
            "'password', ",
            "name: A_KEY,",
            "export A_KEY=b c ",
            "secret: x ",
            "<password>",
            "login a ",
            "Private-Lines: 1 ",
        ),
    ],
)
def test_time_grows_with_the_text_and_no_faster(piece: str) -> None:
    """Four times the text may take ten times as long on a busy machine, and not the sixteen of a square."""

    def seconds(size: int) -> float:
        start = time.process_time()
        Redactor().text(piece * (size // len(piece)))
        return time.process_time() - start

    seconds(1000)
    assert seconds(80_000) < 10 * max(seconds(20_000), 0.004)


@pytest.mark.soak
def test_a_line_of_ten_megabytes() -> None:
    start = time.process_time()
    shown = Redactor().text("step=1 loss=0.25 " * 600_000 + "api_key='" + SECRETS_HEX + "'")
    assert SECRETS_HEX not in shown
    assert time.process_time() - start < 120
