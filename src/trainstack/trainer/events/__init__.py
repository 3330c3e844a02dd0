"""Events of a run and subscriptions to them."""

from trainstack.trainer.events.bus import Events
from trainstack.trainer.events.event import Callback, Event
from trainstack.trainer.events.filters import Filter, only

__all__ = ["Callback", "Event", "Events", "Filter", "only"]
