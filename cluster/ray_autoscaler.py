"""Asks Ray's autoscaler for the machines that workers need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.autoscaler.sdk import request_resources

if TYPE_CHECKING:
    from kvferry.config import WorkersConfig


def ask_for_workers(count: int, groups: WorkersConfig) -> None:
    """There shall be room for so many workers, until it is asked for something else.

    Room that is there already counts, and a cluster without an autoscaler takes no notice. Every
    worker may be used for either role, so each is asked for as the more demanding group says.
    """
    both = (groups.prefill, groups.decode)
    bundle = {"CPU": max(group.cpus for group in both)}
    gpus = max(group.gpus for group in both)
    if gpus:
        bundle["GPU"] = gpus
    request_resources(bundles=[bundle] * count)
