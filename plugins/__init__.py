"""The plugins that ship with llamamg: one file each, written only against llamamg's public API."""
