#!/usr/bin/env bash
# A Slurm of one node for the tests, as the user who calls it (root): `cluster.sh up FOLDER PORT`,
# `cluster.sh down FOLDER`. State, sockets, logs and process ids lie under FOLDER; no systemd, no
# accounting; four cores and two GPUs, whatever there is. PORT and the one after it are taken.
set -euo pipefail
folder=$(realpath -m "${2:?folder}")
export SLURM_CONF=$folder/slurm.conf

until_true() { # SECONDS COMMAND...
  local end=$((SECONDS + $1)); shift
  until "$@" > /dev/null 2>&1; do
    [ $SECONDS -lt $end ] || { echo "cluster.sh: not in time: $*" >&2; return 1; }
    sleep 0.1
  done
}

start() { # NAME ARGS...: as a daemon of ours, which ends with `down`
  local name=$1
  setsid "$@" < /dev/null > "$folder/log/$name" 2>&1 &
  echo $! > "$folder/pid/$name"
}

is_idle() { [ "$(sinfo -h -p low -o %t)" = idle ]; }

is_empty() { [ -z "$(squeue -h)" ]; }

up() {
  local port=${1:?port} host memory
  host=$(hostname -s)
  memory=$(slurmd -C | sed -n 's/.*RealMemory=\([0-9]*\).*/\1/p')
  mkdir -p "$folder"/{state,spool,log,pid}
  chmod 755 "$folder"
  (umask 077 && head -c 128 /dev/urandom > "$folder/munge.key")
  for i in 0 1; do [ -c "$folder/gpu$i" ] || mknod "$folder/gpu$i" c 1 3; done
  echo "NodeName=$host Name=gpu File=$folder/gpu[0-1]" > "$folder/gres.conf"
  cat > "$SLURM_CONF" << CONF
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.sock
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/pid/slurmctld.own
SlurmdPidFile=$folder/pid/slurmd.own
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 RealMemory=$memory Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
CONF
  start munged -F --key-file="$folder/munge.key" --socket="$folder/munge.sock" \
    --pid-file="$folder/pid/munged.own" --log-file="$folder/log/munged.own" \
    --seed-file="$folder/munge.seed"
  until_true 30 test -S "$folder/munge.sock"
  start slurmctld -D -i
  start slurmd -D
  until_true 60 is_idle
}

down() {
  timeout 20 scancel -f -u "$(id -un)" || true
  until_true 20 is_empty || true
  local name pid
  for name in slurmd slurmctld munged; do
    [ -f "$folder/pid/$name" ] || continue
    pid=$(cat "$folder/pid/$name")
    kill "$pid" 2> /dev/null || continue
    until_true 15 eval "! kill -0 $pid" || kill -9 "$pid"
  done
}

"$1" "${@:3}"
