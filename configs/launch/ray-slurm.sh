#!/bin/bash
# Asynchronous training: the trainer on the GPUs of the first node, rollouts on those of the others, by Ray.
# sbatch configs/launch/ray-slurm.sh CONFIG [key=value ...]
# On the 2 nodes below, for instance: my-grpo.yaml fleet.engine=ray fleet.workers=1, with a plan whose
# actor.generate has the 8 GPUs of a node. To add nodes to a run, start this script with a RAY_AUTH_TOKEN, have another
# job run `RAY_AUTH_MODE=token ray start --address=FIRST_NODE:6379 --block` with it, and write fleet.yaml
# (docs/asynchronous.md).
#SBATCH --job-name=jrlhf-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the end the trainer is asked to stop: it finishes the iteration, saves, and leaves with 75.
#SBATCH --signal=B:TERM@300
set -uo pipefail

config=${1:?usage: sbatch ray-slurm.sh CONFIG [key=value ...]}
shift
: "${SLURM_JOB_ID:?is not set: start this script by sbatch}"
name=${RUN_NAME:-$(basename "$config" .yaml)-$SLURM_JOB_ID} # the same after a requeue; RUN_NAME=.. resumes that of another job
# RUN_DIR is on a file system that outlives the node, or an address, s3://BUCKET/PREFIX.
run_dir=${RUN_DIR:-$SLURM_SUBMIT_DIR/runs}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
# Others on the network can reach Ray's port: only who has the token is served.
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(32))')}
export RAY_ADDRESS="$head:6379" RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# The first node offers no GPU to Ray: they are the trainer's.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    ray start --head --port=6379 --num-gpus=0 --include-dashboard=false --block &
if [[ "$SLURM_JOB_NUM_NODES" -gt 1 ]]; then
    srun --nodes="$((SLURM_JOB_NUM_NODES - 1))" --ntasks-per-node=1 --exclude="$head" --overlap \
        bash -c "until ray start --address=$RAY_ADDRESS --block; do sleep 2; done" &
fi

# Until the head answers, at most two minutes.
for _ in $(seq 60); do
    if srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap ray status >/dev/null 2>&1; then break; fi
    sleep 2
done

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap --gpus-per-node=8 \
    python -u -m jrlhf.train --config "$config" "run_dir=$run_dir" "name=$name" "$@" --resume=auto &
trainer=$!
trap 'kill -TERM "$trainer"' TERM
wait "$trainer"
code=$?
while kill -0 "$trainer" 2>/dev/null; do # `wait` ends at a signal, before the trainer has saved
    wait "$trainer"
    code=$?
done
if [[ $code -eq 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
