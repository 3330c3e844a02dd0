"""Events of a run and subscriptions to them."""

from trainstack.trainer.events.bus import Events
from trainstack.trainer.events.event import Callback, Event
from trainstack.trainer.events.filters import Filter, call_filter

__all__ = ["Callback", "Event", "Events", "Filter", "call_filter"]
