"""The common base of the records of options."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of a pipeline that belong together, checked."""

    @property
    def parts(self) -> dict[str, Any]:
        """The facts that states of two pipelines must share: all fields, in values that compare and print."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
