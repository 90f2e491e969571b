"""What the child process is asked to do."""

import hmac
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lab.certify_settings import CertifySettings

KEY = "key"
"""The entry beside a request with the key that its worker signs messages with."""


def sign_frame(key: str, number: int, content: str) -> str:
    """Return the signature of a worker's message, of which there have been `number` before."""
    return hmac.new(key.encode(), f"{number} {content}".encode(), "sha256").hexdigest()


@dataclass(frozen=True)
class Request:
    """A target to certify in a child process.

    Attributes:
        target: "package.module:factory".
        settings: as for `certify`, but options of the factory are text as typed, and the device may
            be "auto".
        only: names of the laws to try; None for all.
        memory: most memory that the child may take, GiB.
        seconds: time after which a law is stopped.
    """

    target: str
    settings: CertifySettings
    only: list[str] | None
    memory: int | float
    seconds: int | float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Request":
        """Return the request that `to_json` gave the fields of."""
        return cls(**{**fields, "settings": CertifySettings.from_json(fields["settings"])})
