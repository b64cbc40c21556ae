//! Set-id programs, devices, capabilities and secrets.
