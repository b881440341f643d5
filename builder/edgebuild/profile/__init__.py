"""Device profiles: what a device is and how it is to be used, read strictly."""

from __future__ import annotations

from edgebuild.profile.loader import bundled_names, bundled_traffic, find_profile, load_profile
from edgebuild.profile.schema import Profile, json_schema

__all__ = ["Profile", "bundled_names", "bundled_traffic", "find_profile", "json_schema", "load_profile"]
