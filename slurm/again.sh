# Sourced by the templates. A run that a signal stopped (its time is up, or another job needs the
# place) has saved what it has and ended with status 130: the job is put back in the queue, and
# goes on from there. Not so where a person cancelled it, which Slurm's state says.

PYTHON=${PYTHON:-.venv/bin/python}

again_if_stopped() { # STATUS: the last line of a template
  if [ "$1" -eq 130 ] || [ "$1" -eq 137 ]; then
    sleep 2
    if [ "$(squeue -h -t all -j "$SLURM_JOB_ID" -o %T)" = RUNNING ] \
      && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
      echo "stopped (status $1): job $SLURM_JOB_ID is requeued"
      scontrol requeue "$SLURM_JOB_ID"
      sleep 60 # Slurm ends it
    fi
  fi
  exit "$1"
}
