// The steps of the lesson, in order. Their unchanging words are in index.html, in sections of the same name.
//
//   next             what the button says that leads to the next step
//   early            whether it begins before the model has arrived
//   prepares         whether the step is about a text, which is then generated up to its middle
//   look             the layer and the head at the start, by default 0 and 0; "start": those of model.json
//   make(store, i)   makes what depends on i, model.json, and listens to the clicks
//   enter(store, m)  what happens at the start. m is the moment that a link points to: see address.js
//   go(store, n)     what Enter and the button of the form do. n: how many tokens to add
//   click(store, i)  what a click on character i does
//   draw(state)      draws the picture and says what has to be said about it
import { breaks } from "./steps/break.js";
import { cost } from "./steps/cost.js";
import { idea } from "./steps/idea.js";
import { inside } from "./steps/inside.js";
import { race } from "./steps/race.js";
import { why } from "./steps/why.js";

const code = { next: "Why is that safe?" };

export const STEPS = [idea, race, code, why, inside, breaks, cost];
