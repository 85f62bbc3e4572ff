#!/bin/bash
# A Ray cluster on the nodes of a SLURM allocation, and one training in it:
#   sbatch --nodes=4 --gpus-per-node=4 slurm.sh train /shared/job.yaml save.dir=/shared/runs
# Every node needs the same environment (activate it before sbatch) and the same /shared.
#SBATCH --job-name=raytrain
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail
umask 077

port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

# Nodes reach each other at their own addresses, so every connection needs this token. It is in a file that only this
# user can read, in the submit folder, which the nodes share.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/.raytrain-token-$SLURM_JOB_ID RAY_USAGE_STATS_ENABLED=0
unset RAY_AUTH_TOKEN
python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH"

pids=()
cleanup() {
    kill -TERM "${pids[@]}" 2> /dev/null || true
    wait "${pids[@]}" 2> /dev/null || true
    rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap cleanup EXIT

cpus=${SLURM_CPUS_ON_NODE:-$(nproc)}
gpus=${SLURM_GPUS_ON_NODE:-0}
start=(ray start --block --disable-usage-stats --num-cpus="$cpus" --num-gpus="$gpus")
srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
    "${start[@]}" --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false ${RAY_HEAD_OPTIONS:-} &
pids+=($!)
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" "${start[@]}" --address="$head_ip:$port" &
    pids+=($!)
done

# Ray answers once its head is up; the training starts when all nodes have joined.
python - "$head_ip:$port" "${#nodes[@]}" << 'PYTHON'
import sys
import time

from ray._raylet import GcsClient

address, count = sys.argv[1], int(sys.argv[2])
ends = time.monotonic() + 300
seen = 0
while time.monotonic() < ends:
    try:
        rows = GcsClient(address=address).get_all_node_info(timeout=10)
        seen = len([row for row in rows.values() if row.state == 0])
    except Exception as error:
        print(f"waiting for {address}: {type(error).__name__}", file=sys.stderr)
    if seen >= count:
        raise SystemExit(0)
    time.sleep(2)
raise SystemExit(f"{seen} of {count} nodes joined {address} within 300 s: see the output of `ray start` above")
PYTHON

# SLURM signals this script before the time limit: the run saves and exits with 130, and a requeued job resumes it.
verb=$1
shift
if [ "$verb" = train ]; then set -- "$@" --resume auto; fi
python -m jobs "$verb" "$@" "cluster.address=$head_ip:$port" &
run=$!
signalled=1
trap 'kill -TERM "$run" 2> /dev/null || true; signalled=1' TERM
while [ "$signalled" = 1 ]; do  # a trapped signal ends `wait` early
    signalled=0
    code=0
    wait "$run" || code=$?
done
exit "$code"
