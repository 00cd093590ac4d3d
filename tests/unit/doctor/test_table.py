from __future__ import annotations

from lockstep.doctor import table
from lockstep.doctor.finding import Finding


def test_why_and_fix_are_shown_where_something_is_to_be_done() -> None:
    shown = list(
        table.lines(
            [
                Finding(check="disk", status="ok", what="plenty", why="hidden", fix="hidden"),
                Finding(check="host name", status="error", what="bad", why="because", fix="do --this-and-that"),
            ],
            width=80,
        )
    )
    assert shown == [
        "ERROR    host name  bad",
        "                    why: because",
        "                    fix: do --this-and-that",
        "ok       disk       plenty",
    ]


def test_a_command_to_copy_is_never_broken() -> None:
    fix = "ssh-copy-id " + "x" * 200
    shown = list(table.lines([Finding(check="ssh", status="warning", what="w " * 100, why="y " * 100, fix=fix)], 60))
    assert any(line.endswith(fix) for line in shown)
    assert all(len(line) <= 60 for line in shown if not line.endswith(fix))


def test_the_summary_counts() -> None:
    states = ("ok", "ok", "warning", "error", "error", "skipped")
    findings = [Finding(check="a", status=state, what="b") for state in states]
    assert table.summary(findings) == "2 errors, 1 warning, 2 ok, 1 skipped"
    assert table.summary([]) == "no checks were run"


def test_errors_and_warnings_come_first_each_in_the_order_of_the_checks() -> None:
    given = [("a", "ok"), ("b", "skipped"), ("c", "warning"), ("d", "error"), ("e", "ok"), ("f", "warning")]
    findings = [Finding(check=name, status=status, what="x") for name, status in given]
    assert [finding.check for finding in table.gravest_first(findings)] == ["d", "c", "f", "a", "e", "b"]
