"""The report as a browser's parser reads it."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from bench.record import Targets
from bench.report import render_report
from kvferry.errors import InvalidInput
from tests.support.run_records import queued_run

NASTY = '</title><script>document.title="x"</script><img src=x onerror=alert(1)>"&'
_VOID = {"meta", "input", "br", "img", "link"}


class Tree(HTMLParser):
    """Elements of a page; fails where one is not closed in its turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def sweep_runs():
    targets = Targets(1.0, 0.05)
    return [
        queued_run(
            seed=rate,
            count=120,
            slower=slower * rate / 4,
            name=name,
            load={"mode": "open", "rate": rate},
            targets=targets,
        )
        for name, slower in (("one and one", 1.0), ("two of both", 1.4))
        for rate in (2, 4, 6)
    ]


def test_one_run_has_every_plot_with_a_title_a_description_and_a_table() -> None:
    tree = Tree(render_report([queued_run(seed=1)]))
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [each for each in tree.of("svg") if each.get("role") == "img"]
    assert len(pictures) == 10
    for each in pictures:
        for name in (each["aria-labelledby"] or "").split():
            assert name in ids
    # Each plot, the workers' two, summary and circumstances.
    assert len(tree.of("table")) == 14
    assert len(tree.of("details")) == 11
    for each in tree.of("a"):
        assert (each["href"] or "").removeprefix("#") in ids


def test_it_needs_nothing_from_elsewhere() -> None:
    tree = Tree(render_report([queued_run(seed=1)]))
    tags = {tag for tag, _ in tree.elements}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    for _, attributes in tree.elements:
        assert not {"src", "onclick", "onload"} & set(attributes)
    policy = next(each["content"] for each in tree.of("meta") if "http-equiv" in each)
    assert "default-src 'none'" in (policy or "")
    assert "url(" not in "".join(tree.texts)


def test_texts_of_a_record_are_texts() -> None:
    run = queued_run(
        seed=1,
        name=NASTY,
        dataset={"name": NASTY},
        config={NASTY: {"model": NASTY}},
        warnings=(NASTY,),
    )
    tree = Tree(render_report([run, run]))
    assert not {"script", "img"} & {tag for tag, _ in tree.elements}
    assert "".join(tree.texts).count(NASTY) >= 8


def test_two_runs_are_compared_and_overlaid() -> None:
    a, b = queued_run(seed=1, name="a"), queued_run(seed=1, name="b", slower=1.5)
    tree = Tree(render_report([a, b]))
    text = "".join(tree.texts)
    assert "paired: both runs sent the same requests" in text
    assert "higher: worse" in text
    assert [each["id"] for each in tree.of("input")] == ["show0", "show1"]
    for place in (0, 1):
        drawn = [each for each in tree.of("path") if f"run{place}" in (each.get("class") or "")]
        assert len(drawn) >= 10


def test_a_sweep_of_two_names_has_lines_and_winners() -> None:
    tree = Tree(render_report(sweep_runs()))
    text = "".join(tree.texts)
    assert "Over rate" in text
    assert "Where two of both wins and where it loses" in text
    lines = [e for e in tree.of("path") if (e.get("class") or "").startswith("pointed whole line")]
    assert len(lines) == 12
    assert all((each["d"] or "").count("L") == 2 for each in lines)
    assert "one and one, rate 4" in text


def test_what_no_run_tells_is_said_and_a_run_of_nothing_is_a_page() -> None:
    text = "".join(Tree(render_report([queued_run(seed=1, count=0)])).texts)
    assert text.count("No run tells it.") >= 5


def test_the_same_records_make_the_same_page() -> None:
    runs = [queued_run(seed=seed, count=50) for seed in (1, 2, 3)]
    assert render_report(runs) == render_report(runs)


def test_many_requests_make_a_small_page_that_says_so() -> None:
    page = render_report([queued_run(seed=1, count=30_000)])
    assert len(page) < 300_000
    assert "every n-th request is a dot" in page


def test_no_run_and_too_many_are_refused() -> None:
    with pytest.raises(InvalidInput, match="runs"):
        render_report([])
    with pytest.raises(InvalidInput, match="runs"):
        render_report([queued_run(seed=1, count=1)] * 65)
