"""The route tables of all devices, joined. The order is the default order of choice."""

from __future__ import annotations

from ninfer.routes import host, host_linear
from ninfer.routes.route import RouteRegistry

REGISTRY = RouteRegistry((*host_linear.ROUTES, *host.ROUTES))
