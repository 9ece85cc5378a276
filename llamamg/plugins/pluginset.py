"""The plugins of one server: which are on, their instances, and what happens when one is toggled or fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import pluggy
from prometheus_client import CollectorRegistry

from llamamg.config import Config, PluginsConfig
from llamamg.guard import Guard, GuardCounts
from llamamg.hooks import Hook, Hooks, trace_wanted
from llamamg.plugins.declaration import PluginError, Unavailable
from llamamg.plugins.discovery import EntryPoint, Found, discover, new_manager
from llamamg.plugins.member import Member, text_of
from llamamg.plugins.selection import conflict, declaration_of, select, unknown
from llamamg.plugins.view import PluginView

if TYPE_CHECKING:
    from llamamg.engine import Engine

log = logging.getLogger(__name__)
Switches = dict[str, int]


class PluginSet:
    """All installed plugins. Any thread may ask for `views`; the rest belongs to the engine thread once that runs."""

    def __init__(self, config: PluginsConfig, found: Mapping[str, Found], *, traced: bool | None = None) -> None:
        self.config = config
        self.hooks = Hooks(traced=trace_wanted() if traced is None else traced)
        self.warnings: list[str] = []  # sentences for the log at the start
        # set by the engine; gets the switches of all enabled plugins after each toggle, refuses them with a PluginError
        self.apply_switches: Callable[[Switches], None] | None = None
        self.registry = CollectorRegistry()  # counters of the plugins' own, a part of /metrics
        self.routes: dict[str, list[Any]] = {}  # plugin -> its HTTP routes
        self._members = {name: Member(entry) for name, entry in found.items()}
        self._found = found
        self._manager: pluggy.PluginManager = new_manager()
        self._full: Config | None = None
        self._devices: Seq[Any] = ()
        self._named: frozenset[str] = frozenset()  # enabled by name, so that they must be on
        self._engine: Engine | None = None

    @classmethod
    def discover(cls, config: PluginsConfig, points: Iterable[EntryPoint] | None = None) -> PluginSet:
        """Find what is installed. Nothing is enabled yet; broken packages appear in `views` and `warnings`."""
        found = discover(points)
        plugins = cls(config, found)
        plugins.warnings = [f"plugin {name}: {entry.broken}" for name, entry in found.items() if entry.broken]
        return plugins

    # ---- start and stop

    def configure(self, config: Config, devices: Seq[Any] = ()) -> Config:
        """Decide which plugins are on; returns the configuration with the context values they asked for.

        Raises PluginError with a sentence: unknown names, bad options, conflicts, requirements, a named plugin that
        does not apply.
        """
        selection = select(self.config, self._found)
        self.warnings += selection.warnings
        self._named = frozenset(selection.named)
        self._full, self._devices = config, devices
        for name, member in self._members.items():
            if member.found.broken is None and (member.found.shipped or name in selection.order):
                self._instantiate(member)
            elif member.found.broken is None and name in self.config.options:
                member.parse(self.config.options[name])  # a wrong value is an error now, not at a later toggle
            member.reason = selection.left_out.get(name)
        for name in selection.order:
            self._configure_one(name, self._members[name], named=name in self._named)
        self.native_switches()
        self._recompile()
        return self._full

    def _configure_one(self, name: str, member: Member, *, named: bool) -> None:
        missing = [need for need in declaration_of(name, self._found).requires if not self._is_on(need)]
        if missing:
            sentence = f"{name} requires {missing[0]}, which is not on: add --enable {missing[0]} or --disable {name}"
            if named:
                raise PluginError(sentence)
            member.reason = f"requires {missing[0]}, which is not on"
            return
        try:
            changed = self._call(member, "configure", config=self._full, devices=self._devices)
        except Unavailable as error:
            if named:
                raise _refused(name, error) from error
            member.reason = str(error)
            return
        except PluginError:
            raise  # what the user asked of it cannot be
        except Exception as error:
            if named:
                sentence = f"{name} failed in configure ({text_of(error)}); start without --enable {name}"
                raise PluginError(sentence) from error
            member.quarantined = f"configure: {text_of(error)}"
            self.warnings.append(f"plugin {name} is off: {member.quarantined}")
            return
        if changed is not None:
            self._full = changed
        member.configured = member.enabled = True

    def start(self, engine: Engine) -> None:
        """Start the enabled plugins, take their metrics and routes; on the engine thread, before the first step.

        Raises PluginError with a sentence: a named plugin does not apply, or an option asks for what cannot be.
        """
        self._engine = engine
        for name, member in list(self._members.items()):
            if member.enabled:
                try:
                    self._start_one(member)
                except Unavailable as error:
                    if name in self._named:
                        raise _refused(name, error) from error
                    member.reason = str(error)
                    self._switch_off(name, f"requires {name}, which does not apply here")
                except PluginError:
                    raise
                except Exception as error:
                    self.quarantine(name, error, "start")

    def stop(self) -> None:
        """Run `engine_stop` of every plugin that was started."""
        for name, member in self._members.items():
            if member.started:
                member.started = False
                try:
                    self._call(member, "engine_stop", engine=self._engine)
                except Exception as error:
                    log.error("plugin %s failed in engine_stop: %s", name, text_of(error))

    # ---- toggling

    def toggle(self, name: str, enabled: bool) -> None:
        """Switch a plugin between two steps. Raises PluginError with what to do instead, and changes nothing then."""
        member = self._members.get(name)
        if member is None:
            raise PluginError(unknown(name, self._found))
        if member.found.broken is not None:
            raise PluginError(f"plugin {name} cannot be used: {member.found.broken}")
        if member.enabled == enabled:
            if not enabled:
                member.quarantined = member.reason = None
            return
        self._check_toggle_class(name, enabled)
        if enabled:
            self._enable(name, member)
        else:
            needed = [other for other in self._on() if name in declaration_of(other, self._found).requires]
            if needed:
                raise PluginError(f"{needed[0]} requires {name}: switch {needed[0]} off first")
            member.enabled = False
        self._recompile()
        try:
            self._switch()
        except PluginError:
            member.enabled = not enabled
            self._recompile()
            raise
        member.quarantined = member.reason = None

    def _check_toggle_class(self, name: str, enabled: bool) -> None:
        toggle = declaration_of(name, self._found).toggle
        if toggle == "restart":
            flag = "--enable" if enabled else "--disable"
            raise PluginError(f"{name} can only be switched at the start: restart with {flag} {name}")
        n_busy = sum(slot.busy for slot in self._engine.slots) if self._engine is not None else 0
        if toggle == "idle" and n_busy:
            raise PluginError(f"{name} can only be switched while nothing runs; busy slots: {n_busy}; try again later")

    def _enable(self, name: str, member: Member) -> None:
        for other in self._on():
            if other != name and conflict(name, other, self._found):
                raise PluginError(f"{name} conflicts with {other}: switch {other} off first")
        for need in declaration_of(name, self._found).requires:
            if not self._is_on(need):
                raise PluginError(f"{name} requires {need}: switch {need} on first")
        if member.instance is None:
            self._instantiate(member)
        try:
            if not member.configured:
                changed = self._call(member, "configure", config=self._full, devices=self._devices)
                if changed is not None and changed != self._full:
                    raise PluginError(f"{name} changes the context: restart with --enable {name}")
                member.configured = True
            if self._engine is not None:
                self._start_one(member)
        except Unavailable as error:
            member.reason = str(error)
            raise PluginError(f"{name} cannot be enabled here: {error}") from error
        except PluginError:
            raise
        except Exception as error:
            member.quarantined = text_of(error)
            raise PluginError(f"{name} could not be enabled, it raised {text_of(error)}") from error
        member.enabled = True
        try:
            self.native_switches()
        except PluginError:
            member.enabled = False
            raise

    def quarantine(self, function: str | Hook, error: BaseException, hook: str = "") -> None:
        """Switch off the plugin whose hook function (or name) this is, because it raised, and whatever requires it."""
        if isinstance(function, str):
            name = function
        else:
            name, hook = self.hooks.owner(function) or ("", "")
        if name not in self._members:
            raise ValueError(f"{function!r} belongs to no plugin") from error
        member = self._members[name]
        reason = f"{hook}: {text_of(error)}" if hook else text_of(error)
        member.quarantined = reason
        log.error("plugin %s is off: %s", name, reason, exc_info=error)
        self._switch_off(name, f"requires {name}, which was switched off by an error")
        for told in self.hooks.plugin_quarantined:
            try:
                told(name, reason)
            except Exception as second:
                self.quarantine(told, second)

    def find_owner(self, function: Hook) -> str:
        """The plugin of a compiled hook function. Raises KeyError for a foreign function."""
        owner = self.hooks.owner(function)
        if owner is None:
            raise KeyError(function)
        return owner[0]

    # ---- what others ask

    def native_switches(self) -> Switches:
        """The native switches of all enabled plugins. Raises PluginError when two want different values of one."""
        switches: Switches = {}
        owners: dict[str, str] = {}
        for name in self._on():
            try:
                wanted = self._call(self._members[name], "native_switches", config=self._full, devices=self._devices)
            except Exception as error:
                self.quarantine(name, error, "native_switches")
                continue
            for switch, value in (wanted or {}).items():
                if switches.setdefault(switch, int(value)) != int(value):
                    raise PluginError(
                        f"{owners[switch]} and {name} want different values of the native switch {switch}: "
                        "enable only one of the two"
                    )
                owners.setdefault(switch, name)
        return switches

    def switches_of(self, name: str) -> Switches:
        """The native switches that one plugin wants; {} for one that is off or wants none."""
        if not self._is_on(name):
            return {}
        wanted = self._call(self._members[name], "native_switches", config=self._full, devices=self._devices)
        return {switch: int(value) for switch, value in (wanted or {}).items()}

    def guards(self) -> dict[str, Guard]:
        """What each usable plugin promises."""
        return {n: m.found.declaration.guard for n, m in self._members.items() if m.found.declaration is not None}

    def guard_counts(self, name: str) -> GuardCounts:
        """Where idle replays are counted."""
        return self._members[name].guard_counts

    def views(self) -> list[PluginView]:
        """A snapshot of all plugins; any thread may ask."""
        return [member.view(self.hooks, decided=self._full is not None) for member in self._members.values()]

    def enabled(self) -> list[str]:
        """Names of the plugins that are on."""
        return list(self._on())

    # ---- inside

    def _switch_off(self, name: str, reason_of_others: str) -> None:
        """A plugin cannot go on, nor can those that require it."""
        self._members[name].enabled = False
        for other in self._on():
            if name in declaration_of(other, self._found).requires:
                self._members[other].enabled = False
                self._members[other].reason = reason_of_others
        self._recompile()
        try:
            self._switch()
        except PluginError as refusal:
            log.error("the native switches of plugin %s stay as they are: %s", name, refusal)

    def _instantiate(self, member: Member) -> None:
        member.instantiate(self.config.options.get(member.name, {}))
        self._manager.register(member.instance, member.name)

    def _call(self, member: Member, hook: str, **arguments: Any) -> Any:
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            if impl.plugin is member.instance:
                return impl.function(*[arguments[name] for name in impl.argnames])
        return None

    def _start_one(self, member: Member) -> None:
        if not member.started:
            self._call(member, "engine_start", engine=self._engine)
            member.started = True
            self._call(member, "register_metrics", metrics=self.registry)
            routes = self._call(member, "register_routes")
            if routes:
                self.routes[member.name] = list(routes)

    def _on(self) -> list[str]:
        return [name for name, member in self._members.items() if member.enabled]

    def _is_on(self, name: str) -> bool:
        return name in self._members and self._members[name].enabled

    def _recompile(self) -> None:
        self.hooks.compile(self._manager, sorted(self._on(), key=lambda name: (self._found[name].shipped, name)))

    def _switch(self) -> None:
        if self.apply_switches is not None:
            self.apply_switches(self.native_switches())


def _refused(name: str, error: Unavailable) -> PluginError:
    return PluginError(f"{name} cannot be enabled here: {error}; start without --enable {name}")
