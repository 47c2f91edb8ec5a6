"""Taylor-Calibrate: softmax-attention Transformers to hybrid Gated DeltaNet students.

Importing the package registers the hybrid student classes with `transformers`, so that
`AutoModelForCausalLM.from_pretrained(path)` loads a saved student. The registration is lazy where
it can be: nothing that needs a GPU is imported.
"""

__version__ = "0.1.0"

from tc.student import hybrid as _hybrid  # noqa: F401 - registers the student classes
