"""By what settings requests are admitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.request import ServiceClass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.router_config import ServiceClassConfig, ServiceClassesConfig, TenantConfig


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What admission goes by."""

    classes: ServiceClassesConfig
    tenants: TenantConfig
    requests_max: int
    step_tokens: int
    """Prompt tokens that a worker computes in one step."""

    def of(self, service_class: ServiceClass) -> ServiceClassConfig:
        """The settings of one class."""
        match service_class:
            case ServiceClass.INTERACTIVE:
                return self.classes.interactive
            case ServiceClass.STANDARD:
                return self.classes.standard
            case ServiceClass.BATCH:
                return self.classes.batch

    @property
    def weights(self) -> Mapping[ServiceClass, float]:
        """Of the classes' shares."""
        return {each: self.of(each).weight for each in ServiceClass}
