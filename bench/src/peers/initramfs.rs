//! A first root file system for a kernel: the "newc" format of Documentation/driver-api/early-userspace/buffer-format.rst.

use std::io::Write;

/// Mode of a directory.
const DIR: u32 = 0o040_755;
/// Mode of a program.
const FILE: u32 = 0o100_755;

/// An archive in the making.
#[derive(Default)]
pub(super) struct Initramfs {
    bytes: Vec<u8>,
    entries: u32,
}

impl Initramfs {
    /// Adds a directory; its parent must be there.
    pub(super) fn dir(&mut self, path: &str) {
        self.entry(path, DIR, &[]);
    }

    /// Adds a file; its directory must be there.
    pub(super) fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, FILE, content);
    }

    /// The archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let name = path.trim_start_matches('/');
        let (links, name_len) = (1, name.len() + 1);
        let (inode, bytes) = (self.entries, content.len());
        // Writing to memory does not fail. After mode: uid, gid, links, time, length, four device numbers, length of the name, sum.
        let _ = write!(
            self.bytes,
            "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{links:08x}{0:08x}{bytes:08x}{0:08x}{0:08x}{0:08x}{0:08x}\
             {name_len:08x}{0:08x}{name}\0",
            0
        );
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, mode and content of the entry at `at`, and where the next one is; as the kernel's init/initramfs.c reads them.
    fn read(bytes: &[u8], at: usize) -> (&str, usize, &[u8], usize) {
        assert_eq!(&bytes[at..at + 6], b"070701");
        let number = |field: usize| {
            let digits = &bytes[at + 6 + 8 * field..][..8];
            usize::from_str_radix(str::from_utf8(digits).expect("text"), 16).expect("a number")
        };
        let (name_at, name_len, content_len) = (at + 110, number(11), number(6));
        let name = str::from_utf8(&bytes[name_at..name_at + name_len]).expect("text");
        let content_at = (name_at + name_len).next_multiple_of(4);
        let end = content_at + content_len;
        let name = name.strip_suffix('\0').expect("a NUL");
        (name, number(1), &bytes[content_at..end], end.next_multiple_of(4))
    }

    #[test]
    fn a_kernel_finds_what_was_put_in() {
        let mut archive = Initramfs::default();
        archive.dir("/lib");
        archive.file("/lib/some", b"12345");
        let bytes = archive.finish();
        let (name, mode, content, next) = read(&bytes, 0);
        assert_eq!((name, mode, content), ("lib", 0o040_755, &b""[..]));
        let (name, mode, content, next) = read(&bytes, next);
        assert_eq!((name, mode, content), ("lib/some", 0o100_755, &b"12345"[..]));
        let (name, _, _, next) = read(&bytes, next);
        assert_eq!((name, next), ("TRAILER!!!", bytes.len()));
    }
}
