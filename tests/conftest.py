"""Fixtures shared by all tests: each starts one real component, once per run. Array shapes of the trainer are checked while they run."""

from jaxtyping import install_import_hook

from tests.support import shapes

SHAPES_CHECKED = ("losses", "advantages", "packing", "selection", "hindsight", "head", "lean", "model")
"""Modules of the trainer whose annotated shapes beartype compares with every argument and result; before anything imports them."""
install_import_hook([f"trainer.{name}" for name in SHAPES_CHECKED], f"{shapes.__name__}.checked")

pytest_plugins = [
    "tests.support.kafka",
    "tests.support.spark",
    "tests.support.model",
    "tests.support.serving",
    "tests.support.harness",
    "tests.support.release",
]
