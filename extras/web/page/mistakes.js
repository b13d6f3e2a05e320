// Six mistakes with a cache, beginning with the one that is hardest to see in the text. Each is made in one place
// of generateWithMistake in generate.js, and T is the length of the prompt.
//
//   title, meaning  in words
//   bug, correct    the line with the mistake, and the correct one
//   position(i, T)  the claimed position of the new token i of the text
//   again           feed the last token of the prompt twice
//   overwrite       write every new column into the slot after the prompt
//   mask            hide from each new token the one before it
//   other           decode with the cache of another prompt, as long but without a character in common

export const MISTAKES = {
  "one too far": {
    title: "Position off by one",
    meaning: "The position says where in the text a character is. Here, each new one is one place too far.",
    bug: "position = len(text) + 1", correct: "position = len(text)",
    position: (i) => i + 1,
  },
  "fed twice": {
    title: "Last character fed twice",
    meaning: "The prompt’s last character gets a second column, so everything after it is one place too far.",
    bug: "model(prompt); logits = model(prompt[-1])", correct: "logits = model(prompt)",
    position: (i) => i + 1, again: true,
  },
  "another prompt": {
    title: "Another prompt’s cache",
    meaning: "The model continues somebody else’s prompt.",
    bug: "cache = caches[0]", correct: "cache = caches[user]",
    other: true,
  },
  overwritten: {
    title: "Slot overwritten each time",
    meaning: "A slot is the cache’s place for one position. Here, each new one overwrites the one before it.",
    bug: "cache[len(prompt)] = column", correct: "cache[len(text)] = column",
    overwrite: true,
  },
  mask: {
    title: "Previous character hidden",
    meaning: "The mask says which columns a character may look at. Here, it hides the one just before.",
    bug: "visible = slots != position - 1", correct: "visible = slots <= position",
    mask: true,
  },
  "never moves": {
    title: "Position never advances",
    meaning: "The position says where in the text a character is. Here, all new characters are in the same place.",
    bug: "position = len(prompt)", correct: "position = len(text)",
    position: (i, T) => T,
  },
};
export const NAMES = Object.keys(MISTAKES);
export const ROUNDING = 1e-3; // correct numbers differ by less when they are computed differently
