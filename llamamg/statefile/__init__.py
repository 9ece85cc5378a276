"""Files that keep computed sequences: slots saved by name, and the disk tier of the cache."""

from llamamg.statefile.format import VERSION, Header, NoStateFile, OtherVersion, StateFileError, StateInfo
from llamamg.statefile.lock import FolderInUse, FolderLock
from llamamg.statefile.model import model_identity
from llamamg.statefile.read import StateFile, check_identity
from llamamg.statefile.write import write_state_file

__all__ = [
    "VERSION",
    "FolderInUse",
    "FolderLock",
    "Header",
    "NoStateFile",
    "OtherVersion",
    "StateFile",
    "StateFileError",
    "StateInfo",
    "check_identity",
    "model_identity",
    "write_state_file",
]
