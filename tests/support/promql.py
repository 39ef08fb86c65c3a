"""What a PromQL expression asks for: its selectors, and the labels it groups by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

_PARTS = ("expr", "lhs", "rhs", "param", "vector_selector")


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric by its name, and what its labels must be."""

    name: str
    matchers: tuple[tuple[str, promql.MatchOp, str], ...]
    groups: tuple[str, ...]
    """Labels that the aggregations around it keep by name."""

    def takes(self, name: str, labels: dict[str, str]) -> bool:
        """Whether a sample is one of those."""
        return name == self.name and all(
            _is_match(operation, labels.get(label, ""), value)
            for label, operation, value in self.matchers
        )


def selectors(expr: str) -> list[Selector]:
    """Raises `ValueError` for what is no PromQL."""
    return list(_selectors(promql.parse(expr), ()))


def _selectors(node: Any, groups: tuple[str, ...]):
    if isinstance(node, promql.VectorSelector):
        matchers = tuple((each.name, each.op, each.value) for each in node.matchers.matchers)
        yield Selector(node.name, matchers, groups)
        return
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        assert node.modifier.type == promql.AggModifierType.By, "say what is kept"
        groups = (*groups, *node.modifier.labels)
    for part in _PARTS:
        child = getattr(node, part, None)
        if child is not None:
            yield from _selectors(child, groups)
    for child in getattr(node, "args", ()):
        yield from _selectors(child, groups)


def _is_match(operation: promql.MatchOp, is_value: str, value: str) -> bool:
    match str(operation).rpartition(".")[2]:
        case "Equal":
            return is_value == value
        case "NotEqual":
            return is_value != value
        case "Re":
            return re.fullmatch(value, is_value) is not None
        case "NotRe":
            return re.fullmatch(value, is_value) is None
        case other:
            raise AssertionError(other)
