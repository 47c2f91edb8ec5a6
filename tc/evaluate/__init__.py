"""How good a model is, on held-out text, on tasks, in long prompts; and what it costs."""

from tc.evaluate.corpus import run_corpus
from tc.evaluate.generation import run_generation
from tc.evaluate.perplexity import Perplexity, perplexity
from tc.evaluate.positions import run_positions
from tc.evaluate.results import Result, Results, merged, read_results, write_results
from tc.evaluate.ruler import run_ruler
from tc.evaluate.sources import sources
from tc.evaluate.tasks import run_tasks

__all__ = [
    "Perplexity",
    "Result",
    "Results",
    "merged",
    "perplexity",
    "read_results",
    "run_corpus",
    "run_generation",
    "run_positions",
    "run_ruler",
    "run_tasks",
    "sources",
    "write_results",
]
