"""Compilations, watched: a loop that has settled compiles nothing, and one that does says what and why."""

import logging

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompilationWatch(logging.Handler):
    """Counts compilations in this process. As a context manager it also collects JAX's explanations of cache misses."""

    def __init__(self):
        super().__init__()
        self._names: list[str] = []
        self._causes: list[str] = []
        self._propagate = True

    def __enter__(self) -> "CompilationWatch":
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        logger = logging.getLogger("jax")
        self._propagate, logger.propagate = logger.propagate, False  # told once, by whoever watches
        logger.addHandler(self)
        return self

    def __exit__(self, *_):
        jax.config.update("jax_explain_cache_misses", False)
        logger = logging.getLogger("jax")
        logger.removeHandler(self)
        logger.propagate = self._propagate
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def explain(self) -> None:
        """From here on JAX tells the cause of every cache miss: costs nothing while there is none."""
        jax.config.update("jax_explain_cache_misses", True)

    def take(self) -> tuple[list[str], list[str]]:
        """The names of the programs compiled since the last call, and the causes where JAX told them."""
        taken = self._names, self._causes
        self._names, self._causes = [], []
        return taken

    def _on_event(self, event: str, duration_secs: float, **details) -> None:
        if event == _COMPILED:
            self._names.append(str(details.get("fun_name", "a function")))

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "CACHE MISS" in message:
            self._causes.append(" ".join(message.split()))
        elif self._propagate:  # what is not ours to tell goes its usual way
            logging.getLogger().handle(record)
