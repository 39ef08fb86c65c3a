"""What is told of members as views follow one another."""

from __future__ import annotations

from cluster.member_news import MemberNews
from cluster.member_state import Phase
from tests.support.cluster_views import view_of


def test_the_first_view_is_no_news() -> None:
    assert MemberNews().lines(view_of(a=Phase.RUNNING)) == []


def test_an_end_is_told_with_its_reason_and_a_return_once() -> None:
    news = MemberNews()
    news.lines(view_of(a=Phase.RUNNING, b=Phase.RUNNING))
    assert news.lines(view_of(a=Phase.RUNNING, b=Phase.WAITING)) == ["b: waiting (killed)"]
    assert news.lines(view_of(a=Phase.RUNNING, b=Phase.RUNNING)) == ["b: running"]
    assert news.lines(view_of(a=Phase.RUNNING, b=Phase.RUNNING)) == []


def test_who_comes_and_who_leaves_is_told() -> None:
    news = MemberNews()
    news.lines(view_of(a=Phase.RUNNING))
    assert news.lines(view_of(c=Phase.STARTING)) == ["c: starting", "a: removed"]
