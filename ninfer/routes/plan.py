"""Moved to ninfer.devices.plan."""

from ninfer.devices.plan import BufferRef as BufferRef
from ninfer.devices.plan import Launch as Launch
from ninfer.devices.plan import Place as Place
from ninfer.devices.plan import Plan as Plan
