"""The route tables of GPUs, joined."""

from __future__ import annotations

from typing import Any

from ninfer.routes import attention_cuda, elementwise_cuda, embed_cuda, norm_cuda, recurrent_cuda, sample_cuda
from ninfer.routes.route import Route

CUDA_ROUTES: tuple[Route[Any], ...] = (
    *norm_cuda.ROUTES,
    *attention_cuda.ROUTES,
    *embed_cuda.ROUTES,
    *elementwise_cuda.ROUTES,
    *recurrent_cuda.ROUTES,
    *sample_cuda.ROUTES,
)
