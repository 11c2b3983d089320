"""add-expert: a new type of experts from its formula, as far as everything that proves it."""

from skills.add_expert.skill import SKILL

__all__ = ["SKILL"]
