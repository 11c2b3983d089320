"""The skill debug-nan: finds the first value of a run that is not finite."""

from skills.debug_nan.skill import SKILL

__all__ = ["SKILL"]
