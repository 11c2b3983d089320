"""What every skill is made of, and what runs and proves one. Nothing here knows a particular skill.

A skill is a folder `skills/<name>/` with a page, SKILL.md, and an object of a `Skill` class that the page's front
matter names under `pith.entry`. `pith skill run` reads the parameters, asks for preconditions, lets the steps work in a
`Workspace`, proves their outcome by postconditions, and only then lands the changed files in the checkout.
"""

from skills.frame.contract import Failed, Missing, Params, Result, Skill
from skills.frame.workspace import Workspace

__all__ = ["Failed", "Missing", "Params", "Result", "Skill", "Workspace"]
