"""What the author of a skill writes: parameters, result, preconditions, steps, postconditions."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator

if TYPE_CHECKING:
    from skills.frame.workspace import Workspace


class Params(BaseModel):
    """Parameters of a skill; the docstring under a field is its help.

    Required fields are positional on the command line, in their order; those with a default, and those declared with
    `Field(kw_only=True)`, are options (`top_k` is `--top-k`). Lists repeat their option; a bool has a `--no-` form.
    Relative paths are taken from the current directory: a Path is absolute when the skill sees it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="after")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(cls._absolute(part) for part in value)
        return value.absolute() if isinstance(value, Path) else value


class Result(BaseModel, ABC):
    """What a skill found or did; the docstring under a field is its description in the schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @abstractmethod
    def summary(self) -> str:
        """A few lines for people: what was done or found, and what to do next. They stand last."""

    def outlook(self) -> str:
        """The same after a dry run of what changes the checkout: what was not proven, and what a real run does."""
        return "Nothing was proven, and nothing has changed: a run without --dry-run proves this, then lands it."


P = TypeVar("P", bound=Params)
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Missing:
    """A precondition that does not hold, and how to make it hold."""

    what: str
    remedy: str


class Failed(Exception):
    """Raised by steps that cannot go on: the message says what, got, expected and the remedy. Nothing lands."""


class Skill(ABC, Generic[P, R]):
    """A procedure with a contract. One without state: everything it knows comes as arguments."""

    params: type[P]
    result: type[R]
    writes: ClassVar[bool] = False
    """Whether it changes the checkout. If so, it works on a copy, whose changes land together when all is proven."""

    @abstractmethod
    def preconditions(self, params: P, root: Path) -> list[Missing]:
        """What the run needs and does not find, in the checkout at `root` or elsewhere. Looks, changes nothing.

        Raises ValueError where the parameters themselves are wrong.
        """

    @abstractmethod
    def steps(self, params: P, workspace: "Workspace") -> R:
        """The work. Files change below `workspace.root` (only if `writes`) and `workspace.out`, nowhere else."""

    @abstractmethod
    def postconditions(self, params: P, result: R, workspace: "Workspace") -> list[str]:
        """What does not hold after the steps, in words; empty when the outcome is proven."""
