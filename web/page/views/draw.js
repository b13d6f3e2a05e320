// What several views need: elements by id, a canvas in device pixels, the colours of the style sheet.

export const $ = (id) => document.getElementById(id);

/** Return the 2d context of an empty canvas that is as fine as the screen, in CSS pixels, and its width and height. */
export function blank(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}

export function colour(name) {
  return getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();
}

/** Return a character as one visible glyph or word. */
export function visible(char) {
  return { " ": "space", "\n": "newline", "\t": "tab" }[char] ?? char;
}

export function quoted(char) {
  return char.trim() ? `“${char}”` : visible(char);
}

/** Return an element with text, which never becomes markup. */
export function element(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties);
}

/** Make a table body of rows. A row is a list of cells; a cell is an element, or the text of one. */
export function fillTable(body, rows) {
  body.replaceChildren(
    ...rows.map(([head, ...cells]) => {
      const row = element("tr");
      row.append(head instanceof Node ? head : element("th", head, { scope: "row" }));
      row.append(...cells.map((cell) => (cell instanceof Node ? cell : element("td", cell))));
      return row;
    }),
  );
}

export function inEnglish(number) {
  return number.toLocaleString("en");
}
