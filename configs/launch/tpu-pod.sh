#!/bin/bash
# One process on every host of a TPU pod:
#   TPU=my-tpu ZONE=us-east5-a BUCKET=gs://my-bucket SOURCE=git+https://HOST/jrlhf.git@COMMIT \
#       configs/launch/tpu-pod.sh CONFIG [key=value ...]
# On a v5p-512, for instance: llama3-70b-ppo
# FILES="my_rewards.py data.jsonl" copies files that your config names, by their names alone, to every host.
# The output of all hosts comes to this terminal alone: run it in tmux with `2>&1 | tee NAME.log`. If the terminal closes,
# the run saves and ends; after any end but 0 the same command resumes it.
# PYTHON names the hosts' Python 3.11 or newer; without it python3.
# SECRET names a secret of Secret Manager with a token for gated models, which the hosts' service account may read.
# The runs lie in the bucket, which every host mounts: process 0 writes, all of them save and restore checkpoints.
set -euo pipefail

: "${TPU:?name of the TPU VM}" "${ZONE:?its zone}" "${BUCKET:?gs://bucket for the runs}"
: "${SOURCE:?where pip finds jrlhf: git+https://..., or the URL of a wheel}"
config=${1:?usage: tpu-pod.sh CONFIG [key=value ...]}
shift
name=${NAME:-$(basename "$config" .yaml)}
python=${PYTHON:-python3}

on_all() {
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

on_all "$python -c 'import sys; sys.exit(f\"jrlhf needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}: install a newer one, and name it by PYTHON=\" if sys.version_info < (3, 11) else 0)' &&
    $python -m pip install --quiet 'jrlhf[tpu,hf] @ $SOURCE'"
on_all "mkdir -p ~/runs && (mountpoint -q ~/runs || gcsfuse --implicit-dirs '${BUCKET#gs://}' ~/runs)"
for file in ${FILES:-}; do
    gcloud compute tpus tpu-vm scp "$file" "$TPU:$(basename "$file")" --zone="$ZONE" --worker=all
done
if [[ -f "$config" ]]; then
    gcloud compute tpus tpu-vm scp "$config" "$TPU:config.yaml" --zone="$ZONE" --worker=all
    config=config.yaml
fi

token=
if [[ -n "${SECRET:-}" ]]; then # read by each host: a value on a command line can be seen by others
    token="HF_TOKEN=\$(gcloud secrets versions access latest --secret=$SECRET) && export HF_TOKEN"
fi

# JAX finds the other hosts by the TPU's metadata. A run that was preempted leaves with 75 and goes on.
overrides=${*:+$(printf ' %q' "$@")}
on_all "
    set -u
    $token
    while true; do
        $python -u -m jrlhf.train --config $config run_dir=\$HOME/runs name=$name device.platform=tpu$overrides --resume=auto
        code=\$?
        test \$code -eq 75 || exit \$code
        sleep 30
    done
"
