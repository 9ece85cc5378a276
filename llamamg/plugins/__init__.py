"""The plugin system: declaring, finding, choosing, toggling. Hook contracts are in llamamg.hookspecs."""

from llamamg.plugins.declaration import PluginDeclaration, PluginError, Unavailable, plugin
from llamamg.plugins.discovery import Found, PluginSwitch, discover, plugin_options, plugin_switches
from llamamg.plugins.options import Options, PluginOption
from llamamg.plugins.pluginset import PluginSet
from llamamg.plugins.view import PluginView

__all__ = [
    "Found",
    "Options",
    "PluginDeclaration",
    "PluginError",
    "PluginOption",
    "PluginSet",
    "PluginSwitch",
    "PluginView",
    "Unavailable",
    "discover",
    "plugin",
    "plugin_options",
    "plugin_switches",
]
