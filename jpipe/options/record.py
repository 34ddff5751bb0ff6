"""What the records of options have in common."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of a pipeline that belong together, checked."""

    @property
    def parts(self) -> dict[str, Any]:
        """What states of two pipelines must have in common: all fields, in values that compare and print."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
