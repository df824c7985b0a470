# An image for configs/launch/: docker build --build-arg EXTRA=tpu -t jrlhf:tpu . (or EXTRA=cuda12, EXTRA=cuda13)
# Runs lie in /srv/runs, which a container loses: mount a volume there, or set run_dir. Processes are root; to run as
# another user, give --user (runAsUser) and let that user write /cache and the runs. pip takes the newest versions: keep
# the image that a run began with. MORE names further extras, such as --build-arg MORE=ray.
# Wheels bring JAX's libraries; of the machine a GPU image needs only the driver.
FROM python:3.12-slim-bookworm

ARG EXTRA=tpu
ARG MORE=
WORKDIR /opt/jrlhf

# First the requirements alone: they stay in the cache of layers while the sources change.
COPY pyproject.toml README.md LICENSE ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
wrong = set('${EXTRA} ${MORE}'.split()) - set(extras); \
wrong and exit(f'error: there is no extra {sorted(wrong)}: EXTRA and MORE must be among {sorted(extras)}'); \
print(*project['dependencies'], *(line for name in ('hf', 'storage', *'${EXTRA} ${MORE}'.split()) for line in extras[name]), sep='\n')" \
    > requirements.txt && \
    pip install --no-cache-dir -r requirements.txt

COPY . .
RUN pip install --no-cache-dir --no-deps . && python -c "import jrlhf.training"

# Lines appear at once; compiled programs and models of the hub go where a volume may be mounted.
ENV PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
WORKDIR /srv
# The form without a shell: SIGTERM reaches the process, which saves and leaves with 75.
ENTRYPOINT ["jrlhf"]
CMD ["--help"]
