"""The student: Gated DeltaNet mixers inside the teacher's own model."""
