"""Copies between the memory of a context and the host, on threads, while the context decodes other sequences."""

from llamamg.transfer.host import HostCopier
from llamamg.transfer.job import Copier, Piece, Transfer, Work
from llamamg.transfer.pick import pick_copier
from llamamg.transfer.place import PlaceWork
from llamamg.transfer.state import StateWork
from llamamg.transfer.workers import Workers

__all__ = ["Copier", "HostCopier", "Piece", "PlaceWork", "StateWork", "Transfer", "Work", "Workers", "pick_copier"]
