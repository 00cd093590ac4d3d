"""The report as text, JSON and page."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.doctor.net import findings, heatmap, html, png
from lockstep.doctor.net import text as text_report
from lockstep.doctor.net.results import NetReport
from lockstep.errors import ConfigError
from tests.unit.doctor.net.reports import healthy, with_contact, with_link, with_member


def text(report: NetReport) -> str:
    return "\n".join(text_report.lines(report, findings.findings(report)))


def broken() -> NetReport:
    report = with_contact(healthy(("a", "b", "c")), 0, 1, error="no answer within 3 s")
    return NetReport(**{**vars(report), "links": [link for link in report.links if (link.a, link.b) != (0, 1)]})


def test_ok_for_each_rank_at_the_end() -> None:
    lines = text(healthy(("a", "b"))).splitlines()
    assert [line.split() for line in lines[-2:]] == [["rank", "0", "a", "cpu", "OK"], ["rank", "1", "b", "cpu", "OK"]]


def test_who_failed_and_with_whom() -> None:
    shown = text(broken())
    assert re.search(r"rank 0 .* FAILED  it cannot talk to rank 1", shown)
    assert re.search(r"rank 2 .* OK$", shown, re.M)
    assert re.search(r"^  0 a +\. +FAILED +30 us", shown, re.M)


def test_the_hardware_in_percent_and_marks() -> None:
    report = with_link(healthy(("a", "a", "b")), 0, 2, forth=1.25e8)
    shown = text(report)
    assert "14%" in shown  # 1.1 of 8 GB/s inside a node: a copy in memory
    assert "88%" in shown  # 1.1 of 1.25 GB/s: the interface
    assert "10%*" in shown


def test_sizes_that_were_left_out_are_said() -> None:
    assert "16 KiB  left out: the time budget is used up" in text(healthy(("a", "b")))


def test_large_jobs_get_no_matrix_on_the_screen() -> None:
    shown = text(healthy([f"n{number}" for number in range(text_report.WIDEST + 1)]))
    assert "the matrices are in --json and --html" in shown
    assert "Latency" not in shown


def test_json_has_all_of_it_and_no_token() -> None:
    report = with_member(healthy(("a", "b")), 0, token="secret")
    plain = text_report.plain(report, findings.findings(report))
    assert "secret" not in json.dumps(plain)
    assert plain["ok"] is True
    assert plain["links"][0]["share"] == 1.1e9 / 1.25e9
    assert plain["links"][0]["compared_with"] == "nominal"
    assert plain["all_reduce"]["points"][0]["size"] == 1024
    assert plain["memory_copy"] == {"a": 8e9, "b": 8e9}
    assert text_report.plain(broken(), findings.findings(broken()))["ok"] is False


@pytest.mark.parametrize("ranks", [1, 3, 20, png.MOST + 1])
def test_the_picture_is_one_and_larger_for_more_ranks(ranks: int, tmp_path: Path) -> None:
    report = broken() if ranks == 3 else healthy([f"n{number}" for number in range(ranks)])
    made = tmp_path / "net.png"
    png.draw(report, findings.findings(report), made)
    data = made.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert 500 < width < 4000
    assert 300 < height < 8000


def test_without_matplotlib_it_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'torch-lockstep\[png\]'"):
        png.require()


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_page_stands_alone_and_has_a_cell_for_each_pair() -> None:
    report = with_member(broken(), 2, host="<script>alert(1)</script>")
    made = html.render(report, findings.findings(report))
    tags = _Tags()
    tags.feed(made)
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in tags.seen)
    assert not any("src" in attributes or "href" in attributes for _, attributes in tags.seen)
    assert sum(tag == "rect" for tag, _ in tags.seen) == 2 * 6
    assert made.count(">failed</text>") == 4
    assert sum(tag == "circle" for tag, _ in tags.seen) == 2  # the sizes that were measured


def test_what_differs_little_looks_alike_and_what_is_bad_does_not() -> None:
    report = healthy(("a", "b", "c"))
    little = with_link(with_link(report, 0, 1, forth=1e9, back=1e9), 0, 2, forth=0.8e9, back=0.8e9)
    little = with_link(little, 1, 2, forth=0.9e9, back=0.9e9)
    much = with_link(little, 1, 2, forth=0.9e9, back=1e7)
    strongest = heatmap.shade(1.0)
    assert strongest not in html.render(little, [])
    assert html.render(much, []).count(strongest) == 1
