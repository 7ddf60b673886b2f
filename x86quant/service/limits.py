"""``Limits``: how much a service takes on."""

from __future__ import annotations

import dataclasses

from x86quant.errors import InvalidInputError


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How much a service takes on; whatever is beyond is refused with a status that says so.

    Attributes:
        body_bytes: of a request.
        inputs: texts in a request.
        batch_tokens: tokens that are computed in one call of the model, where a text that alone has
            more is a batch by itself. Who waits for a batch waits for all of it.
        waiting: texts that wait at a time, over all requests.
        timeout_s: how long a text waits for its turn.
    """

    body_bytes: int = 2 << 20
    inputs: int = 128
    batch_tokens: int = 512
    waiting: int = 512
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:  # nor NaN
                raise InvalidInputError(f"{field.name} must be more than 0, not {value}")
