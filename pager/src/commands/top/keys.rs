//! What was typed, decoded: letters, and the sequences that terminals send for keys without one.

/// A key that `gms top` knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// To the workload above.
    Up,
    /// To the one below.
    Down,
    /// A screen up.
    PageUp,
    /// A screen down.
    PageDown,
    /// To the first.
    Home,
    /// To the last.
    End,
    /// Sorts by the column with this letter.
    Letter(char),
    /// Leaves.
    Quit,
}

const ESCAPE: u8 = 0x1b;
const CTRL_C: u8 = 3;

/// Decodes what one read brought. Sequences that are not known, and a lone escape, which may be the first part of one, mean nothing.
pub(super) fn parse(mut bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    while let Some((&first, rest)) = bytes.split_first() {
        bytes = rest;
        let key = match first {
            ESCAPE => match sequence(rest) {
                None => None,
                Some((key, length)) => {
                    bytes = &rest[length..];
                    key
                }
            },
            CTRL_C | b'q' | b'Q' => Some(Key::Quit),
            b'k' => Some(Key::Up),
            b'j' => Some(Key::Down),
            b'g' => Some(Key::Home),
            b'G' => Some(Key::End),
            b'a'..=b'z' => Some(Key::Letter(char::from(first))),
            _ => None,
        };
        keys.extend(key);
    }
    keys
}

/// The key and the length of a sequence behind an escape (`[A`, `OA`, `[5~`); `None` if there is none.
fn sequence(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    if !matches!(bytes.first(), Some(b'[' | b'O')) {
        return None;
    }
    let digits = bytes[1..].iter().take_while(|byte| matches!(byte, b'0'..=b'9' | b';')).count();
    let (number, last) = (&bytes[1..1 + digits], bytes.get(1 + digits));
    let key = match (number, last) {
        (_, Some(b'A')) => Some(Key::Up),
        (_, Some(b'B')) => Some(Key::Down),
        (_, Some(b'H')) | (b"1" | b"7", Some(b'~')) => Some(Key::Home),
        (_, Some(b'F')) | (b"4" | b"8", Some(b'~')) => Some(Key::End),
        (b"5", Some(b'~')) => Some(Key::PageUp),
        (b"6", Some(b'~')) => Some(Key::PageDown),
        _ => None,
    };
    Some((key, (2 + digits).min(bytes.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_decoded() {
        let cases: [(&[u8], &[Key]); 9] = [
            (b"q", &[Key::Quit]),
            (b"\x03", &[Key::Quit]),
            (b"\x1b", &[]),
            (b"\x1b[A\x1bOBr", &[Key::Up, Key::Down, Key::Letter('r')]),
            (b"\x1b[5~\x1b[6~", &[Key::PageUp, Key::PageDown]),
            (b"\x1b[H\x1b[4~\x1b[1;5F", &[Key::Home, Key::End, Key::End]),
            (b"\x1b[99~\x1b[Zj", &[Key::Down]),
            (b"\xff\x00", &[]),
            (b"gG", &[Key::Home, Key::End]),
        ];
        for (bytes, keys) in cases {
            assert_eq!(parse(bytes), keys, "{bytes:?}");
        }
    }

    #[test]
    fn nothing_typed_panics() {
        for a in 0..=255 {
            for b in [0, b'[', b'O', b'5', 255] {
                parse(&[ESCAPE, a, b]);
                parse(&[ESCAPE, b, a]);
                parse(&[a, ESCAPE, b]);
            }
        }
    }
}
