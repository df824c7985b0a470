#!/bin/bash
# One process a GPU, on every node: sbatch configs/launch/slurm.sh CONFIG [key=value ...]
# A token for gated models: export HF_TOKEN before; sbatch hands on the environment.
# On the 16 GPUs below, for instance: llama3-8b-ppo mesh.fsdp=16 ppo.algorithm.micro_batches=4
#SBATCH --job-name=jrlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the end the processes are asked to stop: they finish the iteration, save, and leave with 75.
#SBATCH --signal=TERM@300
set -uo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG [key=value ...]}
shift
: "${SLURM_JOB_ID:?is not set: start this script by sbatch}"
# JAX finds the other processes, and each its GPU, by Slurm's own variables. RUN_DIR is on a shared file system, or an
# address, s3://BUCKET/PREFIX, of runs with storage.scratch on one.
name=${RUN_NAME:-$(basename "$config" .yaml)-$SLURM_JOB_ID} # the same after a requeue; RUN_NAME=.. resumes that of another job
run_dir=${RUN_DIR:-$SLURM_SUBMIT_DIR/runs}

# A process that fails ends the others; srun must not, for a killed task would hide the code 75.
srun --kill-on-bad-exit=0 --wait=300 \
    python -u -m jrlhf.train --config "$config" "run_dir=$run_dir" "name=$name" "$@" --resume=auto
code=$?
if [[ $code -eq 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
