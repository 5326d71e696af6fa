"""Recipes: the schema, loading, checking, batch arithmetic and the memory estimate. Never imports torch."""

from __future__ import annotations

from gspo.config.batch import BatchPlan, plan_batch
from gspo.config.check import check_recipe, plan_recipe
from gspo.config.findings import Finding
from gspo.config.load import load_recipe
from gspo.config.memory import ModelSizes, estimate_memory, model_sizes
from gspo.config.schema import Recipe
from gspo.config.source import recipe_text

__all__ = [
    "BatchPlan",
    "Finding",
    "ModelSizes",
    "Recipe",
    "check_recipe",
    "estimate_memory",
    "load_recipe",
    "model_sizes",
    "plan_batch",
    "plan_recipe",
    "recipe_text",
]
