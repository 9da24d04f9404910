//! Texts from elsewhere (names of programs, words of agents), fit to be shown.

/// A character from elsewhere, fit for a terminal: none that controls it (C0, C1), or changes the order or the lines of what it shows.
pub fn plain(c: char) -> char {
    match c {
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            '?'
        }
        c if c.is_control() => '?',
        c => c,
    }
}

/// A text of at most `chars_max` characters: one that was longer ends in `...`.
pub fn cut(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some(_) => text.chars().take(chars_max.saturating_sub(3)).chain("...".chars()).collect(),
        None => text.to_owned(),
    }
}

/// A text from elsewhere, fit for a terminal: [`cut`], and of [`plain`] characters.
pub fn printable(text: &str, chars_max: usize) -> String {
    cut(text, chars_max).chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_cannot_harm_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc", 20), "a?[2Jb?c");
        assert_eq!(printable("a\u{9b}2J\u{202e}b\u{2066}c\u{200f}d\u{2028}", 20), "a?2J?b?c?d?");
        assert_eq!(printable("0123456789", 10), "0123456789");
        assert_eq!(printable("0123456789x", 10), "0123456...");
    }
}
