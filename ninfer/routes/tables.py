"""The route tables of all devices, joined. The order is the default order of choice."""

from __future__ import annotations

from ninfer.routes import (
    attention_cpu,
    elementwise_cpu,
    embed_cpu,
    experts_cpu,
    journal_cpu,
    linear_cpu,
    norm_cpu,
    recurrent_cpu,
    rotated_cpu,
    rounds_cpu,
    sample_cpu,
)
from ninfer.routes.route import RouteRegistry

REGISTRY = RouteRegistry(
    (
        *linear_cpu.ROUTES,
        *norm_cpu.ROUTES,
        *rotated_cpu.ROUTES,
        *attention_cpu.ROUTES,
        *recurrent_cpu.ROUTES,
        *journal_cpu.ROUTES,
        *rounds_cpu.ROUTES,
        *embed_cpu.ROUTES,
        *experts_cpu.ROUTES,
        *elementwise_cpu.ROUTES,
        *sample_cpu.ROUTES,
    )
)
