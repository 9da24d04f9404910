//! Exit statuses of `gms`.

/// Exit status when gms itself fails.
pub const EXIT_GMS: u8 = 125;
/// When the command cannot be executed.
pub const EXIT_NOT_EXECUTABLE: u8 = 126;
/// When the command is not found.
pub const EXIT_NOT_FOUND: u8 = 127;
/// When the command line or the configuration is wrong.
pub const EXIT_USAGE: u8 = 2;
/// When the answer is no: nothing found, a check failed.
pub const EXIT_NO: u8 = 1;
