"""The route tables of all devices, joined. The order is the default order of choice."""

from __future__ import annotations

from ninfer.routes import host, linear_cpu
from ninfer.routes.route import RouteRegistry

REGISTRY = RouteRegistry((*linear_cpu.ROUTES, *host.ROUTES))
