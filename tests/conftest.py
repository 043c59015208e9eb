"""Settings for every test: hypothesis draws the same examples each time, so that a failure repeats."""

import os

from hypothesis import HealthCheck, settings

# Tiny tensors: a second thread only waits for the first, and spins while it does. Servers under test inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("repeatable")
