"""How a mixer starts: each file is one group of equations."""

from tc.init.layer import fresh_mixer, initialise, needs_activations, set_gate
from tc.init.measure import relative_error
from tc.init.projections import form_of
from tc.init.read_out import solve_read_out

__all__ = [
    "form_of",
    "fresh_mixer",
    "initialise",
    "needs_activations",
    "relative_error",
    "set_gate",
    "solve_read_out",
]
