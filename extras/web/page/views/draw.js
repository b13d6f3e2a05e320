// Shared by the views: elements by id, canvases in device pixels, and drawing only what changed.

export const $ = (id) => document.getElementById(id);

const forgetful = [];

/** Return `compute`, run only if an argument differs from the last call: a view draws what changed.
 *
 *  Whatever changes in place has a `version`, a number that is never used twice, and is compared by that.
 */
export function remember(compute) {
  let last = [];
  let result;
  onForget(() => (last = []));
  return (...args) => {
    const versions = args.map((arg) => arg?.version ?? arg);
    if (versions.length === last.length && versions.every((version, i) => Object.is(version, last[i]))) return result;
    last = versions;
    return (result = compute(...args));
  };
}

/** Call `forget` when sizes or colours have changed and every view has to draw again. */
export function onForget(forget) {
  forgetful.push(forget);
}

export function forgetDrawings() {
  for (const forget of forgetful) forget();
}

/** Clear a canvas, at the resolution of the screen. Returns its 2d context, in CSS pixels, and its width and height. */
export function blank(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}

const probe = document.body.appendChild(element("i", "", { hidden: true }));

/** Return a colour of the style sheet in a form that a canvas understands. */
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** Return an element with text, which never becomes markup. */
export function element(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties);
}

/** Set the text of an element. A screen reader announces a status each time it is set, so only if it differs. */
export function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

/** Give an element exactly the classes whose value is true. */
export function classes(element, names) {
  element.className = Object.keys(names).filter((name) => names[name]).join(" ");
}
