//! JSON of texts from elsewhere, fit for a terminal.

use std::io;

use gms_transport::text::plain;
use serde::Serialize;

/// `value` in lines. Characters that are not [`plain`] are escaped: JSON itself demands that of C0 alone.
pub(crate) fn lines(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = String::new();
    for c in serde_json::to_string_pretty(value)?.chars() {
        if c == '\n' || plain(c) == c {
            text.push(c);
        } else {
            c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| text += &format!("\\u{unit:04x}"));
        }
    }
    text.push('\n');
    Ok(text.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_in_json_do_not_control_the_terminal() {
        let said = "a\u{1b}[2J\u{7f}\u{9b}2J\u{202e}\u{2066}\u{2028}\u{61c}\"\\\n\u{e9}\u{1f600}";
        let text = String::from_utf8(lines(&[said]).unwrap()).unwrap();
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [said]);
        let shown: String = text.chars().filter(|&c| c != '\n').collect();
        assert!(shown.chars().all(|c| plain(c) == c), "{text:?}");
        assert!(text.contains("\\u009b2J\\u202e") && text.contains("\u{e9}\u{1f600}"), "{text}");
        assert_eq!(text.lines().count(), 3);
    }
}
