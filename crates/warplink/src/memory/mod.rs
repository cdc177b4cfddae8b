//! Regions, handles, mappings.
