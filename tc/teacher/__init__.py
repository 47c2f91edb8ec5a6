"""Teachers: one loader for a hub id, a local folder, a GGUF file and tiny random models."""

from tc.teacher.convertible import SUPPORTED, check_convertible
from tc.teacher.gguf_convert import convert_gguf
from tc.teacher.load import Teacher, load_teacher, read_geometry

__all__ = [
    "SUPPORTED",
    "Teacher",
    "check_convertible",
    "convert_gguf",
    "load_teacher",
    "read_geometry",
]
